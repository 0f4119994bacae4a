"""Which errors are the user's to mend, and where an error comes from."""

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from bcg_compiler.errors import BcgError
from bcg_compiler.models.zoo import ModelNotFound

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ModelFailed(BcgError, RuntimeError):
    """The model raised on its own, without being compiled."""


def user_error(error: BaseException) -> BcgError | None:
    """The error of this package behind ``error`` that tells the user what to change; ``None`` if there is none.

    Dynamo wraps what a backend raises.
    """
    return next((cause for cause in _causes(error) if isinstance(cause, BcgError)), None)


def model_failed(error: Exception, doing: str) -> ModelFailed:
    """A ``ModelFailed`` for ``error``, with the innermost line of the user's code that it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH_DIR, _OWN_DIR))]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return ModelFailed(f"{doing}: {type(error).__name__}: {str(error).strip() or 'no message'}{where}")


def call_eager(model: torch.nn.Module, inputs: Mapping[str, Any], length: int) -> Any:
    """Call ``model`` as it is. Raises ``ModelFailed``, or the error of this package that tells what to change."""
    try:
        with torch.inference_mode():
            return model(**inputs)
    except Exception as error:
        doing = f"The model itself fails at length {length}, without being compiled"
        raise (user_error(error) or model_failed(error, doing)) from error


@contextmanager
def building(name: str) -> Iterator[None]:
    """What goes wrong while a model is built is about the model or what was asked of it: raised as ``ModelFailed``."""
    try:
        yield
    except (BcgError, ModelNotFound):
        raise
    except ImportError as error:  # its message says what to install
        raise ModelFailed(str(error)) from error
    except Exception as error:
        raise model_failed(error, f"Cannot build the model {name!r}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            todo += [getattr(found, "inner_exception", None), found.__cause__, found.__context__]
