"""`environments.agent_systems.Video_multiagent.Main ...` is `envserver run --env video ...`."""

from envserver_environments.agent_systems import run

if __name__ == "__main__":
    run("video")
