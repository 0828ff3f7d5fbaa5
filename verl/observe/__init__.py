"""Looking at a run: metrics, trackers, curves, reports, traces, memory and FLOPs. Imports only ``common``."""
