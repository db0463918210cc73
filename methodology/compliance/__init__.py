"""Requirements of the draft, judged by what a study recorded."""
