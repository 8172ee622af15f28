"""Cases of `benchmarks/service.py`: the planning service under load, attacks and kills."""
