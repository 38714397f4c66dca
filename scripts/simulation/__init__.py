"""Serving in virtual time: the engine's own policy, scheduler, index and tiers over a cost model instead of a device.

`hardware` and `costs` say what a step takes, `workload` what comes when. `cache` plans and stores over the tiers of
`store`, `replica` runs one scheduler, `run` routes over several, `outcome` counts, and `sizing` searches what a service
level needs; these compute no KV, and read no clock but to measure this CPU. `options`, `report`, `paper`, `paper_page`
and `validate` are the parts of `scripts/simulate.py`.
"""
