"""Handles wait, fetch and say what they are."""

from __future__ import annotations

from concurrent.futures import Future

import cloudpickle
import pytest

from verl.common.errors import MissingField, WorkerError
from verl.controller.handle import Handle
from verl.controller.results import Kept, Result


def test_running_done_failed() -> None:
    future: Future[Result] = Future()
    handle = Handle("role.method", future)
    assert repr(handle) == "<Handle role.method: running>" and not handle.is_done
    with pytest.raises(TimeoutError, match=r"role\.method isn't done after 0\.01 s"):
        handle.get(0.01)
    future.set_result(Kept({"loss": 1, "count": 2}))
    assert handle.get() == {"loss": 1, "count": 2} and handle.fetch("count") == {"count": 2}
    assert repr(handle.wait()) == "<Handle role.method: done>"
    broken: Future[Result] = Future()
    broken.set_exception(WorkerError("role", 1, "gone"))
    assert "failed" in repr(Handle("role.method", broken))
    with pytest.raises(WorkerError, match="gone"):
        Handle("role.method", broken).get()


def test_a_column_that_is_not_there() -> None:
    future: Future[Result] = Future()
    future.set_result(Kept({"loss": 1}))
    with pytest.raises(MissingField, match="los"):
        Handle("role.method", future).fetch("los")


def test_a_handle_is_no_value() -> None:
    with pytest.raises(TypeError, match=r"<Handle a\.b: running> can't be inside another argument"):
        cloudpickle.dumps([Handle("a.b", Future())])
