"""What runs on an instance: guard, agent, links, worker."""
