"""Whether a study follows the draft: its requirements, checked one by one."""
