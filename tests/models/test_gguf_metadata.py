"""What a GGUF file says of its model is what the published configuration says."""

import pytest
from gguf import GGUFWriter

from meshwise.core.errors import ConfigError
from meshwise.models import load_model
from meshwise.models.numerics import read_numerics
from tests.runtime.gguf_writing import write_gguf
from tests.runtime.golden import Golden


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_the_model_of_a_file_is_that_of_its_configuration(name, tmp_path):
    golden = Golden.of(name)
    found = load_model(str(write_gguf(golden, tmp_path / f"{name}.gguf")))
    assert found.name == name
    assert found.train_program() == golden.model.train_program()
    assert read_numerics(found).rotary == read_numerics(golden.model).rotary
    assert read_numerics(found).norm_epsilon == pytest.approx(read_numerics(golden.model).norm_epsilon)


def test_what_a_file_says_and_is_not_understood_is_refused(tmp_path):
    file = write_gguf(Golden.of("gemma2"), tmp_path / "gemma.gguf")
    with pytest.raises(ConfigError, match="metadata of architecture 'gemma2' is not read as a model; give"):
        load_model(str(file))
    with pytest.raises(ConfigError, match=r"key llama.expert_count = 4 is not understood"):
        load_model(str(write_gguf(Golden.of("mixtral"), tmp_path / "mixtral.gguf")))
    writer = GGUFWriter(tmp_path / "rope.gguf", "llama")
    writer.add_rope_scaling_factor(8.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"key llama.rope.scaling.factor = 8.0 is not understood"):
        load_model(str(tmp_path / "rope.gguf"))
    (tmp_path / "torn.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"torn.gguf: cannot be read as GGUF"):
        load_model(str(tmp_path / "torn.gguf"))
