"""Requirements of the draft, judged by recorded studies."""
