"""Images of a request: SGLang gets files, and one token for each where the model reads many.

SGLang (0.5.23) makes pixels of the files with the checkpoint's own processor, as the trainer does, and repeats the
token of an image as often as it has parts; the other tokens stay as they are (SGLANG_MM_AVOID_RETOKENIZE, on by
default). Where it cannot do that, it decodes them and tokenizes the text again, with no more than a warning: the number
of prompt tokens in its answer then mostly is another than ours (``answer_guard``).
"""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from miles_async.types import GenerateRequest, Int32, JsonObject, Picture


def engine_inputs(request: GenerateRequest) -> tuple[Int32, JsonObject]:
    """Token ids as the engine expects them, and the fields of its request that hold the images."""
    if not request.pictures:
        return request.input_ids, {}
    assert request.image_token is not None, "pictures have a token"
    tokens = request.input_ids
    repeated = (tokens[1:] == request.image_token) & (tokens[:-1] == request.image_token)
    first = np.concatenate([[True], ~repeated])  # chat templates write tokens between two images
    return tokens[first], {"image_data": [_data_url(picture) for picture in request.pictures]}


def _data_url(picture: Picture) -> str:
    """Bare base64 would do, but for JPEG: that begins with a slash, which SGLang takes for a path."""
    return "data:image;base64," + b64encode(picture.content).decode()
