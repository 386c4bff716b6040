import pytest

from tvmconv.errors import Error, ModelError
from tvmconv.models.input_spec import InputSpec, assign_names


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1x3x224x224", InputSpec((1, 3, 224, 224))),
        ("image=1x3x8x8", InputSpec((1, 3, 8, 8), "image")),
        ("tokens=1x77,i64", InputSpec((1, 77), "tokens", "int64")),
        ("a=b:0=7,bf16", InputSpec((7,), "a=b:0", "bfloat16")),  # TensorFlow's names have colons
    ],
)
def test_an_input_has_sizes_and_perhaps_a_name_and_a_dtype(text, read):
    assert InputSpec.parse(text) == read


@pytest.mark.parametrize(
    "text", ["", "1x", "x", "1x-3", "=1x3", "a=", "1x3,", "1x3,f8", "0x3", "1x99999999999", "1x" * 16 + "1"]
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(Error):
        InputSpec.parse(text)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([InputSpec((1,))] * 3, "1 is one too many: the model's inputs are x, y"),
        ([InputSpec((1,), "w")], "no input 'w': the model's inputs are x, y"),
        ([InputSpec((1,)), InputSpec((2,), "x")], "'x' is given twice"),
    ],
)
def test_inputs_that_the_model_has_not_are_refused(inputs, said):
    with pytest.raises(ModelError, match=said):
        assign_names(inputs, ["x", "y"])
