"""An agent on LangGraph: a model, its tools, and a graph that goes round between them."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from loop import MODEL, arguments, bash, instructions


def main() -> None:
    given = arguments()
    tools = [tool(bash)]
    model = ChatOpenAI(
        model=MODEL, base_url=given.base_url, api_key="unused", max_retries=0
    ).bind_tools(tools)

    def answer(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", answer)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    messages = [("system", instructions(given.run)), ("user", given.task)]
    print(graph.compile().invoke({"messages": messages})["messages"][-1].content)


main()
