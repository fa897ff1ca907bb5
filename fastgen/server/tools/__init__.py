"""Tool calls: what a model writes when it wants a function called, made into OpenAI's ``tool_calls``, and back into a
promise that it will.

Each family of models has a notation of its own, which its chat template teaches it. A ``ToolFormat`` is one of them::

    format = ToolFormat.detect(tokenizer.template_text(tools=True) or "")   # or ToolFormat.named("hermes")
    tools = read_tools(body["tools"])                                       # InvalidRequestError for bad ones
    choice = read_tool_choice(body["tool_choice"], tools)                   # none, auto, required, or one by name
    params = format.constrain(params, tools=tools, choice=choice, tokenizer=tokenizer)   # in a thread: it blocks

Call it for ``auto`` too: it also keeps special tokens in the text where they mark calls.

A whole answer::

    parsed = format.parse(text, names=choice.names)     # parsed.content, parsed.calls
    message = parsed.as_openai()                        # {"role": "assistant", "content": ..., "tool_calls": [...]}

A streamed one, one ``ToolStream`` for each choice::

    stream = format.stream(names=choice.names)
    for chunk in chunks:
        for delta in stream.push(chunk.text):
            send(delta.as_openai())                     # {"content": ...} or {"tool_calls": [{"index": ...}]}
    for delta in stream.finish():
        send(delta.as_openai())
    finish_reason = "tool_calls" if stream.called and chunk.finish_reason == "stop" else chunk.finish_reason

Text around the calls stays content, except for the white space next to a call. What begins like a call and is none
comes out as content, to the letter. The one difference between the two ways: ``parse`` gives a call that breaks inside
its arguments as content, while a stream has sent the beginning of the call by then and cannot take it back; its rest is
content (``ToolStream.broken`` says so). An answer cut by its length is the usual case.

With the choice ``none`` leave the tools out of the prompt, and take no answer apart.

No torch and no transformers here.
"""

from __future__ import annotations

from fastgen.server.tools.choice import Tool, ToolChoice, read_tool_choice, read_tools
from fastgen.server.tools.formats import FORMATS
from fastgen.server.tools.stream import Delta, Parsed, ToolCall, ToolFormat, ToolStream

__all__ = [
    "FORMATS",
    "Delta",
    "Parsed",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFormat",
    "ToolStream",
    "read_tool_choice",
    "read_tools",
]
