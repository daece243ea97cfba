"""Methods kept apart: invented here, or in need of machinery of their own. Nothing else imports this package."""
