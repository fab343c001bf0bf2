"""Models with their first layers alone, as configurations: their programs take less time to compile."""

import json
from copy import deepcopy

from meshwise.models import load_model


def first_layers(model, layers, folder):
    """Write the configuration of a model's first layers to a folder.

    Args:
        model: a built-in name.
        layers: how many.
        folder: for the file.

    Returns: the path of the file, as `estimate_train` takes it.
    """
    config = deepcopy(dict(load_model(model).config))
    config.get("text_config", config)["num_hidden_layers"] = layers
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return str(file)
