"""For processes whose PYTHONPATH begins here: Triton's interpreter passes for its CPU backend, which V2 asks for."""

from types import SimpleNamespace

from triton.backends import backends


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return False


backends["cpu"] = SimpleNamespace(driver=_NoDriver, compiler=None)  # pyright: ignore[reportArgumentType]
