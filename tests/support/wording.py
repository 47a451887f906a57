"""Words of libraries that no error may show: they speak of their own insides, not of what the user gave."""

import re

_FOREIGN = re.compile(
    r"validation error|input should|field required|extra inputs|value error|pydantic|unable to parse|for further info"
    r"|expecting|extra data|\(char \d|unterminated|EOF while|trailing characters|expected value|at line \d+ column"
    r"|pytorchstream|weights_only|weights only|safetensor_?error|deserializ|header ?too|allow_pickle|pickled data"
    r"|codec can't|errno|recursion depth|digits\) for integer|magic bytes|a tap met|NoneType. object|has no attribute"
    r"|subscriptable|invalid literal|could not convert|unexpected keyword"
    r"|\w+Error\b|traceback|\.str:|\.int:|tuple\[|function-"
    r"|is not a readable [^:]*: \S+$",
    re.I | re.M,
)


def foreign_words(text: str) -> list[str]:
    """What a text has of them; of an error in our words nothing."""
    return _FOREIGN.findall(text)
