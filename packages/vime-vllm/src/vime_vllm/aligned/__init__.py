"""The engine side of an alignment contract: vLLM runs a model class that calls the contract's own operations.

- `registration`, `arguments`, `effective`: in the driver. What vLLM is started with, what is refused, and whether the
  engine took it.
- `installed`: what an engine process makes of the contract that it was handed.
- `modules`, `attention`, `base`: what a model class is built from; `model` is the one of ``dense/v1``.
- `worker`, `sampler`, `sampler_v2`: tokens are scored by the contract's log-softmax, on either model runner.
- `census`, `instruments`, `report`: what really runs, taps, and what is read back.

A structure of one's own is a subclass of `base.AlignedModel` built from `modules`, registered by
``vime_aligned_sides`` as ``"module:Class"``.
"""
