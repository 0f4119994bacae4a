"""The parts of the serving models: flattened tokens over a paged cache.

=====================  =========================================================================================
"""
