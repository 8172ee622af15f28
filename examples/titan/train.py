"""TorchTitan's own entry point, which finds `planned_llama` next to this file; runs on CPUs if there is no GPU."""

import torch

if __name__ == "__main__":
    if not torch.cuda.is_available():
        import titan_cpu  # noqa: F401
    from torchtitan.train import main

    main()
