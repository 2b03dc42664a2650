"""What every suite may say."""


class SuiteError(RuntimeError):
    """A suite cannot be had or run; the message says what to do."""
