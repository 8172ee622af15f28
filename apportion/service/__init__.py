"""The planning service: a cache in front of a pure function from requests to plans.

http ──► engine ──► workers ──► planner
           └──────► store
"""
