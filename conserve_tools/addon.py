"""What the core may ask of this add-on, by the entry point `conserve_tools` of `conserve.addons`.

Loading this loads neither Ray nor the rest of the add-on, as every command does it.
"""

from typing import TYPE_CHECKING

from conserve.settings import Settings

if TYPE_CHECKING:
    from conserve_cli.doctor.facts import Finding
    from conserve_tools.routes import EnvironmentPaths
    from deployments.router.addons import Described


class ToolsAddon:
    """Takes the seats of `deployments.start_checks`, `deployments.router` and the doctor."""

    def require_startable(self, settings: Settings) -> None:
        from conserve_tools.root import require_root

        require_root(settings)

    def described(self) -> "Described":
        from conserve_tools.routes import DESCRIBED

        return DESCRIBED

    def router_part(
        self, application: str, deployment: str, settings: Settings
    ) -> "EnvironmentPaths":
        from conserve_tools.routes import EnvironmentClient, EnvironmentPaths

        if not settings.environments.enabled:
            return EnvironmentPaths(None)
        return EnvironmentPaths(EnvironmentClient(application, deployment, settings))

    def findings(self, settings: Settings) -> "list[Finding]":
        from conserve_tools.root import findings

        return findings(settings)


ADDON = ToolsAddon()
