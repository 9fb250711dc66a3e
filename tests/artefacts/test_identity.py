"""Identities tell apart what differs, and only that."""

from __future__ import annotations

import torch

import wherefrom
from wherefrom.artefacts.identity import differing, fingerprint


def test_fingerprints_tell_apart_what_differs_and_only_that():
    x = torch.randn(4)
    assert fingerprint(x, {"a": 1}) == fingerprint(x.clone(), {"a": 1})
    others = [
        x + 1,
        x.double(),
        x[:2],
        (x, x),
        {"x": x},
        wherefrom.EDM(),
        wherefrom.EDM(rho=6.0),
        wherefrom.DDPM.linear(),
        1,
        "1",
        1.0,
        None,
    ]
    assert len({fingerprint(other) for other in [x, *others]}) == 13


def test_differences_between_settings_are_words():
    assert differing({"a": 1, "b": (1, 2)}, {"a": 1, "b": [1, 2]}) == ""
    assert (
        differing({"a": 1}, {"a": 2, "c": "x"}) == "a was 1 and is now 2, c was None and is now 'x'"
    )


def test_digests_are_not_shown_to_people():
    one, other = fingerprint(1), fingerprint(2)
    assert differing({"weights": one}, {"weights": other}) == "weights was another one"
    assert differing({"vae": {"w": one}}, {"vae": {"w": other}}) == "vae was another one"
    assert differing({"call": "plain"}, {"call": other}) == f"call was 'plain' and is now {other!r}"
