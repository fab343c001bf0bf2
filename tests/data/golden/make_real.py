"""Write what this folder holds of real checkpoints: NAME.json (prompt, greedy tokens) and NAME.npy (logits).

`pip install torch transformers gguf`, and for each checkpoint `python tests/data/golden/make_real.py NAME FILE.gguf`.
The reference library computes in fp32 with the weights of the file, dequantised; of every position's logits those of
each STRIDE-th entry of the vocabulary are kept.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE, KEPT, NEW = Path(__file__).parent, 512, 24
PROMPT = "The capital of France is Paris. The capital of Italy is"


def main(name, file):
    """Write one checkpoint's files."""
    folder, file = str(Path(file).parent), Path(file).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
        greedy = list(tokens)
        for _ in range(NEW):
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    stride = logits.shape[-1] // KEPT
    said = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "file": file,
        "prompt": PROMPT,
        "tokens": tokens,
        "greedy": greedy[len(tokens) :],
        "text": tokenizer.decode(greedy[len(tokens) :]),
        "stride": stride,
        "largest": logits.argmax(-1).tolist(),
        "config": {k: v for k, v in json.loads(model.config.to_json_string()).items() if k != "quantization_config"},
    }
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in said.items())
    (HERE / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    np.save(HERE / f"{name}.npy", logits[:, ::stride].numpy().astype(np.float32))


if __name__ == "__main__":
    main(*sys.argv[1:])
