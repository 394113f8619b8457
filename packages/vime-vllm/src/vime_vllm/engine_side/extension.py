"""Methods that vime adds to vLLM's workers; each returns plain data, so that no pickle travels."""

from __future__ import annotations

import importlib
from typing import Any

from vime_core.record.digest import digest_groups, digest_tensors
from vime_vllm.engine_side.report import worker_report
from vime_vllm.engine_side.weights import kernel_tensors
from vime_vllm.wire import dtype_name


class VimeWorkerExtension:
    """Mixed into the worker class (``worker_extension_cls``); ``self`` is the worker."""

    model_runner: Any
    weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def vime_report(self) -> dict[str, Any]:
        """Environment, settings, versions and hardware of this process."""
        return worker_report(self)

    def vime_weight_version(self) -> int | None:
        """The version of the weights that the model holds; None within an update."""
        return self.weight_transfer_engine.version

    def vime_weight_forms(self) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of every tensor that kernels read, by HF name."""
        model = self.model_runner.get_model()
        return {name: (dtype_name(t.dtype), list(t.shape)) for name, t in kernel_tensors(model)}

    def vime_buffer_digests(self) -> dict[str, str]:
        """Digest of every buffer (tables, scales), which no update may change."""
        return digest_tensors(self.model_runner.get_model().named_buffers())

    def vime_update_weights(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """A chunk into vLLM's weight update, which begins with the first one and is finished with the last.

        All in one call, because a call takes longer than any of it does. Returns `vime_held` after the last chunk,
        nothing after others.
        """
        if chunk["first"]:
            self.start_weight_update()
        self.update_weights({"chunk": chunk})
        if not chunk["last"]:
            return {}
        self.finish_weight_update()
        return self.vime_held()

    def vime_held(self) -> dict[str, Any]:
        """All that is asked after an update, in one answer: version, digests of weights and buffers, stale tensors.

        ``stale`` names tensors that an aligned model derived from weights that it no longer holds; deriving them is
        done before anything is digested.
        """
        model = self.model_runner.get_model()
        stale: list[str] = getattr(model, "stale_tensors", list)()
        weights, buffers = digest_groups(kernel_tensors(model), model.named_buffers())
        return {"version": self.vime_weight_version(), "stale": stale, "buffers": buffers, "weights": weights}

    def vime_call(self, target: str, *args: Any) -> Any:
        """``module:function`` of installed code, called with this worker and plain data; it returns plain data."""
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)(self, *args)
