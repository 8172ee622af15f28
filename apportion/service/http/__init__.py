"""Protocol v1 over HTTP/1.1: uvicorn, in front of it plain ASGI for what ranks read, behind it FastAPI for the rest.

protocol (uvicorn) ──► edge ──► delivery     plans and streams: plain ASGI, nothing is logged, everything counted
                            └─► control      FastAPI: jobs, epochs, iterations, health, metrics, docs
serve: starts store, workers, engine and all of this, and ends it
"""
