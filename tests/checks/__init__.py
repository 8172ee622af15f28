"""Long-running checks of the whole product: `make nightly`, `make replay`, `make kernels`, `make package`."""
