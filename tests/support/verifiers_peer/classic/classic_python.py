"""Classic: the model's programs would run."""

import verifiers as vf
from datasets import Dataset


class Quiet(vf.PythonEnv):
    """Starts no sandbox when it is made."""

    def __init__(self, dataset):
        self.envs = []


def load_environment():
    return Quiet(Dataset.from_list([{"question": "Run something.", "answer": ""}]))
