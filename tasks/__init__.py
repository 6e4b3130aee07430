"""Family tasks: stories, questions, answers, and everything that is known about them."""
