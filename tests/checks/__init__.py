"""Commands that check the whole product at length: `make nightly`, `make replay`, `make kernels`, `make package`."""
