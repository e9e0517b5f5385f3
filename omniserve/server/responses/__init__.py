"""/v1/responses, OpenAI's Responses API: requests become chats, answers become items, and both may be stored.

``fields`` has the body of a request, ``items`` the items of its input and what they are in a chat, ``chat`` makes a
chat of both; ``reading`` does all that, and finds what a request refers to. ``output_items`` makes items of what is
generated, ``shape`` writes the answer. ``store`` keeps answers, ``background`` runs requests without a connection.
``routes`` has the paths.
"""
