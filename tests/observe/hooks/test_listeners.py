"""Functions for which there are no hooks are replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from traindiff.observe.common.listeners import Listeners


def one() -> int:
    return 1


def counting(owner: SimpleNamespace) -> Listeners[Callable[[], None]]:
    def install() -> None:
        original = owner.one

        def function() -> int:
            for listener in listeners:
                listener()
            result: int = original()
            return result

        listeners.replace(owner, "one", function)

    listeners: Listeners[Callable[[], None]] = Listeners(install)
    return listeners


def test_with_the_last_listener_the_function_is_put_back() -> None:
    owner, calls = SimpleNamespace(one=one), list[int]()
    listeners = counting(owner)
    with listeners.attach(lambda: calls.append(1)), listeners.attach(lambda: calls.append(2)):
        assert owner.one() == 1

    assert calls == [1, 2]
    assert owner.one is one


def test_what_somebody_else_has_put_in_its_place_stays() -> None:
    owner, calls = SimpleNamespace(one=one), list[int]()
    listeners = counting(owner)
    with listeners.attach(lambda: calls.append(1)):
        inner = owner.one
        owner.one = lambda: inner() + 1

    assert owner.one() == 2
    assert calls == []
    with listeners.attach(lambda: calls.append(1)):
        assert owner.one() == 2
    assert calls == [1]
