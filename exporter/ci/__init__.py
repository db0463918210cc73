"""Results for continuous integration: a comment for a pull request, and a file of test cases."""
