"""See that the reference library reads golden weights as the tests write them in GGUF, and gives the golden logits.

`pip install torch transformers accelerate gguf` beside meshwise, and `python -m tests.data.golden.check_gguf`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.runtime.gguf_writing import WRITTEN, write_gguf
from tests.runtime.golden import Golden

for name in sys.argv[1:] or WRITTEN:
    golden = Golden.of(name)
    with tempfile.TemporaryDirectory() as folder:
        file = write_gguf(golden, Path(folder) / "model.gguf")
        config = transformers.AutoConfig.for_model(**golden.said["config"])
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file.name, config=config, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        logits = model.eval()(torch.tensor(golden.tokens)).logits.numpy()
    sys.stdout.write(f"{name}: largest difference {np.abs(logits - golden.logits).max():.1g}\n")
