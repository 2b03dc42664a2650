"""The one application that runs at a time."""

import sys
from pathlib import Path

from conserve.embedded import model_path
from conserve.launch import Launch, health
from conserve.settings import EMBEDDED_MODEL
from tests.adapter_files import make_adapter
from tests.engines.applications import START_S, URL, Application
from tests.engines.lone import lone_engine, wait_for_lone
from tests.engines.processes import require_none_left
from tests.machines import environment_without_compilers

# Names of adapters, whether an application has them from its start or not.
ADAPTERS = ("a", "b", "c")


class Stage:
    """The application that runs now; another one replaces it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._application: Application | None = None
        self._launch: Launch | None = None
        self._lone: Launch | None = None

    def use(self, application: Application) -> str:
        """Have this application running, all engines ready; returns its URL."""
        if self._application != application:
            self.clear()
            assert not health(URL)
            model = self.model_of(application)
            launch = self._launch_of(application, model)
            launch.__enter__()
            self._launch = launch
            if application.lone_engine:
                adapters = self.adapters if application.adapters else {}
                self._lone = lone_engine(self._logs / "lone.log", model, adapters=adapters)
            self._application = application
        self.wait_until_whole()
        return URL

    def model_of(self, application: Application) -> str:
        """The model that it serves, made now if it has to be."""
        if application.make_model is None:
            return EMBEDDED_MODEL
        folder = self._logs / f"{application.name}-model"
        if not folder.exists():
            application.make_model(folder)
        return str(folder)

    @property
    def adapters_file(self) -> Path:
        """The file by which adapters come and go."""
        return self._logs / "adapters.json"

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of adapters of the embedded model, by name; the lone engine has all of them."""
        found = {name: self._logs / f"adapter-{name}" for name in ADAPTERS}
        for seed, folder in enumerate(found.values()):
            if not folder.exists():
                make_adapter(folder, model_path(), seed)
        return found

    def _launch_of(self, application: Application, model: str) -> Launch:
        log = self._logs / f"{application.name}.log"
        if application.file is None:
            environment = {}
            if application.no_compiler:
                folder = self._logs / f"{application.name}-programs"
                folder.mkdir()
                environment = environment_without_compilers(folder)
            arguments = [f"model={model}", *application.arguments]
            if application.adapters:
                own = self.adapters
                arguments += (f"adapters.{name}={own[name]}" for name in application.adapters)
                arguments.append(f"adapters_file={self.adapters_file}")
            return Launch(arguments, log, environment)
        file = self._logs / "conserve.yaml"
        file.write_text(application.file)
        return Launch([], log, None, [sys.executable, "-m", "ray.serve.scripts", "run", str(file)])

    def wait_until_whole(self, timeout_s: float = START_S) -> None:
        """Return when every engine of the application is ready."""
        assert self._launch is not None
        assert self._application is not None
        self._launch.wait_until_serving(
            URL,
            self._application.prefillers,
            self._application.decoders,
            timeout_s=timeout_s,
            encoders=self._application.encoders,
        )

    def clear(self) -> None:
        """Stop what runs; fails if a process of it is left."""
        for launch in (self._lone, self._launch):
            if launch is not None:
                launch.stop()
        self._launch = self._lone = self._application = None
        require_none_left()

    def wait_for_lone(self) -> None:
        """Return when the lone engine answers."""
        assert self._lone is not None
        wait_for_lone(self._lone, self._logs)
