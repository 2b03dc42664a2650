"""Finds the model that a request means, by its name, an alias, or a default."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from conserve.errors import ApiError, unknown_model

if TYPE_CHECKING:
    from conserve.settings import Settings

_ANY = "*"


class Names:
    """The names of an application's models.

    An exact name or alias comes before aliases that end in ``*``, and of these the longest.
    """

    def __init__(self, settings: "Settings") -> None:
        self.models = list(settings.each)
        self._default = settings.default_model
        if self._default is None and len(self.models) == 1:
            self._unnamed: str | None = self.models[0]
        else:
            self._unnamed = self._default
        self._exact = {name: name for name in self.models}
        begins: dict[str, str] = {}
        for name, own in settings.each.items():
            for alias in own.aliases:
                if alias.endswith(_ANY):
                    begins[alias.removesuffix(_ANY)] = name
                else:
                    self._exact[alias] = name
        self._begins = sorted(begins.items(), key=lambda one: -len(one[0]))

    def allowed(self, models: Collection[str]) -> list[str]:
        """Return the models that a key may use; ``models`` are those it is limited to, if any."""
        return [name for name in self.models if not models or name in models]

    def find(self, asked: str | None, models: Collection[str] = ()) -> str:
        """Return the model that a request means; raises `ApiError` (404) with those it may use."""
        found = self._unnamed if asked is None else self._named(asked)
        allowed = self.allowed(models)
        if found in allowed:
            assert found is not None
            return found
        if asked is None:
            served = ", ".join(map(repr, allowed))
            raise ApiError(404, f"say which model: {served}", "model_not_found", param="model")
        raise unknown_model(asked, allowed)

    def _named(self, asked: str) -> str | None:
        exact = self._exact.get(asked)
        begun = (name for begin, name in self._begins if asked.startswith(begin))
        return exact or next(begun, self._default)
