"""Serving in virtual time: the engine's own policy, scheduler, index and tiers over a cost model instead of a device.

`hardware` and `costs` give the seconds of a step, `workload` the requests and their arrival times. `cache` plans and
stores over the tiers of `store`, `replica` runs one scheduler, `run` routes over several replicas, `outcome` collects
results, and `sizing` searches the deployment for a service level. `options`, `report`, `paper` and `paper_page` are the
parts of `scripts/simulate.py`.
"""
