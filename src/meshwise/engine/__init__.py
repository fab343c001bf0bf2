"""An engine that serves a model: the planner's own program, executed; the simulator's own scheduler, deciding.

Not here: what a step costs (`costs`), what a load would see (`simulation`), the endpoint (`http`).
"""
