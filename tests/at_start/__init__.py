"""Stand-ins for processes that tests start: Python runs ``sitecustomize.py`` there as it starts."""

from pathlib import Path

# For PYTHONPATH.
FOLDER = Path(__file__).parent
