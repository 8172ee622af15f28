"""Finds a recipe for a request: tries several, simulates the programs of each, keeps the fastest.

candidates ──place──► bound ──schedule, lower──► bound ──simulate──► the best so far ──► its neighbours ──► …
                        └── cannot be the best: dropped ──┘
"""

from apportion.planner.search.candidates import Candidate, neighbours, portfolio
from apportion.planner.search.loop import Portfolio

__all__ = ["Candidate", "Portfolio", "neighbours", "portfolio"]
