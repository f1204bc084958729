"""An environment that any program may play: write a word into a file, look at it, say it."""

from envserver import Environment, HarnessTask, SandboxSpec, Score, Task


class Errand(Environment):
    """Write a word into a file."""

    exact_demonstrations = True
    sandbox = SandboxSpec()

    class Config(Environment.Config):
        ways: list[str] = ["at once"]
        """How each task is to be done: "silently" and "slowly" are no good."""

    def tasks(self, split):
        for way in self.config.ways:
            yield Task(way, {"word": "plum", "way": way}, {"answer": "plum\n"})

    async def rollout(self, task, run):
        raise NotImplementedError

    def harness_task(self, task, run):
        async def read(workspace, words):
            assert words == "It is there."
            assert (await workspace.exec(["cat", "given.txt"])).stdout == b"given"
            return (await workspace.read("/work/answer.txt")).decode()

        instruction = f"Write {task.public['word']} into answer.txt {task.public['way']}."
        return HarnessTask(instruction=instruction, files={"given.txt": b"given"}, output=read)

    def score(self, task, result):
        return Score(reward=float(result.output == task.hidden["answer"]))

    def demonstration(self, task):
        return [
            {"role": "assistant", "content": "```bash\necho plum > answer.txt\n```"},
            {"role": "assistant", "content": "```bash\ncat answer.txt\n```"},
            {"role": "assistant", "content": "It is there."},
        ]
