"""``fg.HFConfig`` as a plugin's entry module subclasses it: cheap to declare, a pydantic model when it is first used.

Importing pydantic takes longer than all else that listing the installed plugins needs. So a class statement over
``fg.HFConfig`` only keeps what it was given, and `realise` makes the real subclass of ``core.hf_config.HFConfig`` when
a config is read. Type checkers see the real base only.
"""

from __future__ import annotations

import threading
from types import new_class
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.core import hf_config

__all__ = ["HFConfig", "realise"]

_lock = threading.RLock()
_REAL = "_realised"
_KEPT = ("__module__", "__qualname__", "__doc__", "__classcell__")


class _Declared(type):
    """A config class whose real one is made on demand; it stands for that one in calls and checks."""

    _given: tuple[dict[str, Any], dict[str, Any]]

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> _Declared:
        # Without its contents, so that every use goes by way of the real class: a classmethod's `super()` needs that.
        kept = {key: value for key, value in namespace.items() if key in _KEPT}
        made = super().__new__(cls, name, bases, kept)
        made._given = (namespace, options)
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return realise(cls)(*args, **fields)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):  # whoever inspects a module must not make it import pydantic
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return getattr(realise(cls), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, realise(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (
            not isinstance(subclass, _Declared) and issubclass(subclass, realise(cls))
        )


class HFConfig(metaclass=_Declared):
    """Stands for ``core.hf_config.HFConfig``."""


def realise(declared: type) -> type[hf_config.HFConfig]:
    """The pydantic model that ``declared`` stands for, made once; any other class is returned as it is.

    Raises:
        Exception: whatever pydantic says of fields that it cannot use.
    """
    if not isinstance(declared, _Declared):
        return declared
    with _lock:
        found = declared.__dict__.get(_REAL)
        if found is None:
            found = _base() if declared is HFConfig else _made(declared)
            setattr(declared, _REAL, found)
    return found


def _base() -> type:
    from fastgen.core import hf_config

    return hf_config.HFConfig


def _made(declared: _Declared) -> type:
    namespace, options = declared._given
    bases = tuple(realise(base) for base in declared.__bases__)

    def pickled(config: Any, _: object) -> Any:
        """By way of the declared class, the one that its module knows."""
        return _restore, (declared, config.__dict__)

    return new_class(
        declared.__name__, bases, options, lambda names: names.update({"__reduce_ex__": pickled, **namespace})
    )


def _restore(declared: type, fields: dict[str, Any]) -> hf_config.HFConfig:
    return realise(declared).model_construct(**fields)
