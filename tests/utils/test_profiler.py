from __future__ import annotations

import inspect


def test_the_documented_import_path_and_signature() -> None:
    from verl.observe import profiler
    from verl.utils.profiler import VerlProfiler

    assert VerlProfiler is profiler.VerlProfiler
    parameters = inspect.signature(VerlProfiler).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "record_memory": True,
        "record_communication": True,
        "output_dir": "./profile_logs",
    }
