"""The blocks that messages of the Messages API are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from omniserve.server.fields import StrictModel

_NO_IMAGES = "images are not supported: this server serves text only; describe the image in words, or remove it"
_REFUSED_BLOCKS = {
    "container_upload": "containers are not supported; send the file's text in a block of the type 'text'",
    "image": _NO_IMAGES,
}
_REFUSED_SOURCES = {
    "base64": "only documents of plain text are supported, no PDF; send the text, with a source of the type 'text'",
    "file": "files are not kept for messages; send the document's text, with a source of the type 'text'",
    "url": "documents are not fetched; send the text, with a source of the type 'text'",
}


class Block(StrictModel):
    """The part that blocks of all types share."""

    cache_control: dict[str, Any] | None = None
    """Without effect: the prefix cache keeps what it can without being asked."""


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None
    """Without effect."""


def _blocks(value: Any) -> Any:
    """Return a content as a list of blocks.

    Raises:
        ValueError: One is of a type that is refused.
    """
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for block in value if isinstance(value, list) else ():
        if isinstance(block, dict) and (advice := _REFUSED_BLOCKS.get(str(block.get("type")))) is not None:
            raise ValueError(advice)
    return value


Texts = Annotated[list[TextBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]
"""Text, as a string or in blocks."""


class DocumentSource(StrictModel):
    """The text of a document, as a string or in blocks."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] | None = None
    data: str | None = None
    content: Texts | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and (advice := _REFUSED_SOURCES.get(str(fields.get("type")))) is not None:
            raise ValueError(advice)
        return fields

    @model_validator(mode="after")
    def _has_its_text(self) -> DocumentSource:
        field = "data" if self.type == "text" else "content"
        if getattr(self, field) is None:
            raise ValueError(f"{field} is missing")
        return self


class DocumentBlock(Block):
    """A document of plain text."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    """Without effect."""


class SearchResultBlock(Block):
    """A result of a search that the client has made."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: dict[str, Any] | None = None
    """Without effect."""


class ToolReferenceBlock(Block):
    """A tool that a search for tools has found."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(Block):
    """Thinking, as an answer had it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Any text. Answers whose thinking is omitted have it in their signature."""


class RedactedThinkingBlock(Block):
    """Thinking that only Anthropic's servers can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_Result = list[
    Annotated[TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")]
]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[_Result, BeforeValidator(_blocks, json_schema_input_type=str | _Result)] = Field([])
    is_error: bool = False


class HostedBlock(Block):
    """A call that Anthropic's servers have made, or its result; it is skipped."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "compaction",
        "fallback",
    ]

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return {"type": fields.get("type")} if isinstance(fields, dict) else fields


_Content = list[
    Annotated[
        TextBlock
        | ToolUseBlock
        | ToolResultBlock
        | ThinkingBlock
        | RedactedThinkingBlock
        | DocumentBlock
        | SearchResultBlock
        | HostedBlock,
        Field(discriminator="type"),
    ]
]
_OF_ASSISTANTS = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock, HostedBlock)


class PastMessage(StrictModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_Content, BeforeValidator(_blocks, json_schema_input_type=str | _Content)]

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> PastMessage:
        for block in self.content:
            is_assistants = isinstance(block, _OF_ASSISTANTS)
            if not isinstance(block, TextBlock) and (
                self.role == "system" or is_assistants != (self.role == "assistant")
            ):
                raise ValueError(f"a message of the role {self.role!r} has no blocks of the type {block.type!r}")
        return self
