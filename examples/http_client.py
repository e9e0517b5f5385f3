"""Ask a running server with the openai client: a streamed chat answer, and batch work beside it.

make serve                                            # in another terminal
python examples/http_client.py http://127.0.0.1:8000
"""

import asyncio
import sys

from openai import AsyncOpenAI


async def chat(client: AsyncOpenAI, model: str) -> None:
    """Stream an answer. Latency-sensitive: a person reads along."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What does json.dumps do?"}],
        max_tokens=60,
        temperature=0,
        service_tier="priority",
        stream=True,
    )
    print("chat: ", end="")
    async for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


async def summarize(client: AsyncOpenAI, model: str, name: str) -> str:
    """Complete a prompt. Best effort: it gets the time that latency-sensitive requests leave."""
    completion = await client.completions.create(
        model=model,
        prompt=f"{name}\n\n",
        max_tokens=40,
        temperature=0,
        extra_body={"service_tier": "flex"},  # completions have no service_tier argument of their own
    )
    return f"batch, {name}: {completion.choices[0].text!r}"


async def main(base_url: str) -> None:
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused") as client:
        model = (await client.models.list()).data[0].id
        names = ("json.loads", "os.path.join", "threading.Lock", "asyncio.run")
        batch = [asyncio.create_task(summarize(client, model, name)) for name in names]
        await chat(client, model)
        for line in await asyncio.gather(*batch):
            print(line)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
