"""The object that the core asks, by the entry point `conserve_tools` of `conserve.addons`.

Loading it loads no Ray.
"""

from typing import TYPE_CHECKING

from conserve.settings import Settings
from conserve_tools import root

if TYPE_CHECKING:
    from conserve_cli.doctor.findings import Finding
    from conserve_tools.routes import EnvironmentPaths
    from deployments.router.addons import Described


class ToolsAddon:
    """Takes the seats of `deployments.start_checks`, `deployments.router` and the doctor."""

    require_startable = staticmethod(root.require_root)

    def findings(self, settings: Settings) -> "list[Finding]":
        from conserve_tools.doctor import findings

        return findings(settings)

    def described(self) -> "Described":
        from conserve_tools.routes import DESCRIBED

        return DESCRIBED

    def router_part(
        self, application: str, deployment: str, settings: Settings
    ) -> "EnvironmentPaths":
        from conserve_tools.routes import EnvironmentClient, EnvironmentPaths

        client = EnvironmentClient(application, deployment, settings)
        return EnvironmentPaths(client if settings.environments.enabled else None)


ADDON = ToolsAddon()
