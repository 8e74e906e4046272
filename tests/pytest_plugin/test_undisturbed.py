"""What tests of a project set in their process does not reach a run, and is there again when it is over."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from ringverify.testing.undisturbed import undisturbed


def settings():
    """What a project may have changed."""
    return {
        "folder": Path.cwd(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device().type,
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "errors": any(action == "error" for action, *_ in warnings.filters),
    }


@pytest.fixture(params=["inference_mode", "no_grad"])
def changed(request, tmp_path, monkeypatch):
    """A process in which all of it is changed."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), getattr(torch, request.param)(), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield settings()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_run_has_the_settings_of_a_fresh_process(changed, ends, tmp_path_factory):
    """However it ends, the project has its own again."""
    folder = tmp_path_factory.mktemp("folder")
    try:
        with undisturbed(folder):
            within = settings()
            if ends == "badly":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert within == {
        "folder": folder,
        "dtype": torch.float32,
        "device": "cpu",
        "gradients": True,
        "inference": False,
        "errors": False,
    }
    assert settings() == changed
    assert (changed["dtype"], changed["device"], changed["gradients"]) == (torch.float64, "meta", False)
    assert changed["errors"]
    assert os.listdir(folder) == []
