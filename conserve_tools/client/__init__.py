"""For agents: a conversation, its tools, and the environment in which they run.

It needs only the server's address::

    from conserve_tools.client import Agent

    with Agent("http://127.0.0.1:8000") as agent:
        env = agent.environment()

        @agent.tool
        def bash(command: str) -> str:
            "Run a shell command."
            return env.run(command).output

        print(agent.run("Which files are there?"))
"""

from conserve_tools.client.agent import Agent
from conserve_tools.client.environment import CommandResult, Environment, EnvironmentRefused
from conserve_tools.client.tools import Tool
