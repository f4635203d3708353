"""What measured cells say: tables, intervals, verdicts, and the words for them."""
