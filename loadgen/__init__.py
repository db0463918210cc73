"""The client: what to send, when to send it, what came back."""
