"""Replaces the torch.cuda functions that megatron-core 0.16.1 also calls on CPUs; import it before megatron."""

import torch

_cuda = torch.cuda
_cuda.current_device = lambda: "cpu"
_cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
_cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
_cuda.random.get_rng_state, _cuda.random.set_rng_state = _cuda.get_rng_state, _cuda.set_rng_state
_cuda.synchronize = lambda *_: None
_cuda.manual_seed = torch.manual_seed
_cuda.is_current_stream_capturing = lambda: False
_cuda._lazy_call = lambda call, **_: None  # Megatron's RNG tracker uses it to set states
torch.Tensor.cuda = lambda self, *_, **__: self


def _on_cpu(make):
    def wrapper(*args, **options):
        if str(options.get("device")) == "cuda":
            options["device"] = "cpu"
        return make(*args, **options)

    return wrapper


for _name in ("ones", "zeros", "empty", "tensor"):
    setattr(torch, _name, _on_cpu(getattr(torch, _name)))
