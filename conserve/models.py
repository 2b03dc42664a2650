"""Finds the model, or its adapter, that a request means, by a name, an alias, or a default."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from conserve.adapters import Adapter, Adapters
from conserve.errors import ApiError, unknown_model

if TYPE_CHECKING:
    from conserve.settings import Settings

_ANY = "*"


class Names:
    """The names of an application's models, and of their adapters, as files have them now.

    An exact name or alias comes before an adapter's name, and that before aliases that end in
    ``*``, of which the longest counts. Raises `AdapterError` if an adapter is not usable.
    """

    def __init__(self, settings: "Settings", now_s: float) -> None:
        self.models = list(settings.each)
        self._default = settings.default_model
        if self._default is None and len(self.models) == 1:
            self._unnamed: str | None = self.models[0]
        else:
            self._unnamed = self._default
        self._exact = {name: name for name in self.models}
        self._adapters = {
            name: Adapters(own, now_s) for name, own in settings.each.items() if own.adapts
        }
        begins: dict[str, str] = {}
        for name, own in settings.each.items():
            for alias in own.aliases:
                if alias.endswith(_ANY):
                    begins[alias.removesuffix(_ANY)] = name
                else:
                    self._exact[alias] = name
        self._begins = sorted(begins.items(), key=lambda one: -len(one[0]))

    def allowed(self, models: Collection[str], now_s: float) -> list[str]:
        """Return the models and adapters that a key may use; none in ``models``: it may use all."""
        adapters = [name for own in self._adapters.values() for name in sorted(own.all(now_s))]
        served = [*self.models, *(name for name in adapters if name not in self._exact)]
        return [name for name in served if not models or name in models]

    def find(
        self, asked: str | None, models: Collection[str], now_s: float
    ) -> tuple[str, Adapter | None]:
        """Return the model that a request means, and its adapter; otherwise as `allowed`.

        Raises `ApiError` (404) with the names that it may use.
        """
        model, adapter = self._named(asked, now_s)
        allowed = self.allowed(models, now_s)
        if model is not None and (model if adapter is None else adapter.name) in allowed:
            return model, adapter
        if asked is None:
            served = ", ".join(map(repr, allowed)) or "this key is for none here"
            raise ApiError(404, f"say which model: {served}", "model_not_found", param="model")
        raise unknown_model(asked, allowed)

    def _named(self, asked: str | None, now_s: float) -> tuple[str | None, Adapter | None]:
        if asked is None:
            return self._unnamed, None
        if (exact := self._exact.get(asked)) is not None:
            return exact, None
        for model, own in self._adapters.items():
            if (adapter := own.all(now_s).get(asked)) is not None:
                return model, adapter
        begun = (name for begin, name in self._begins if asked.startswith(begin))
        return next(begun, self._default), None
