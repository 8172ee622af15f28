"""Find a recipe for a request: try several, simulate the programs of each, keep the fastest.

candidates ──place──► bound ──schedule, lower──► bound ──simulate──► the best so far ──► its neighbours ──► …
                        └── cannot be the best: dropped ──┘
"""

from apportion.planner.search.candidates import Candidate, neighbours, portfolio
from apportion.planner.search.loop import Portfolio

__all__ = ["Candidate", "Portfolio", "neighbours", "portfolio"]
